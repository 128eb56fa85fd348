"""Reports of runs: a static HTML page with curves, heatmaps, scatter plots and parameters."""
