"""Tiny models, proposers and folders that tests share."""
