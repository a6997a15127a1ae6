"""Which drafter belongs to which target, and loading both."""
