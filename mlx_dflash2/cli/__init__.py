"""What the commands share about a terminal."""
