"""Training a DFlash 2 drafter for any target."""
