"""The commands of `zoo` that plan, draw, compare, evaluate and export."""
