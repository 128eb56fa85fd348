"""The commands of `zoo` that plan, draw, compare, evaluate, export and report."""
