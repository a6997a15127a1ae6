"""The decoding loop and all that it needs."""
