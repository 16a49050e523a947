"""What others can read: one file a format. Each takes records and writes one file; none knows an argument."""
