"""Pairs of a target and the drafter that was made for it."""
