"""strategy="hivemind", on the real package."""
