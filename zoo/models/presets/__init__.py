"""Model constructors from scratch, and the sizes of published models."""
