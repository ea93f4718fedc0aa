"""strategy="horovod", on the real package."""
