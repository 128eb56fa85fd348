"""PEFT's adapter files, read and written."""
