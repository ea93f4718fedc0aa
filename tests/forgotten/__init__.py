"""What is forgotten in a retrofit is an error, and right code is left alone."""
