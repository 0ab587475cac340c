"""Speed and memory as ratios within one run; see README.md. Not part of the package."""
