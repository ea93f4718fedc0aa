"""strategy="deepspeed", on DeepSpeed itself."""
