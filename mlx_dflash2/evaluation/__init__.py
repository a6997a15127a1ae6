"""Measuring tools that commands share."""
