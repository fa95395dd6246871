"""Live: real processes and threads, every start method."""
