"""What a run reports: metric names, statistics, rank reduction and the recorder."""
