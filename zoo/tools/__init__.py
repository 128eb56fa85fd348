"""Tools that look at models and runs: plan, draw, compare, check, report. What trains or loads a model imports none."""
