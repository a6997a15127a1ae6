"""Reading, checking and writing the files of models."""
