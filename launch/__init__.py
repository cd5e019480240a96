"""Plan, start and watch the processes of a run; the top layer, free of torch."""
