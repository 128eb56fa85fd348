"""Read and write PEFT's adapter files."""
