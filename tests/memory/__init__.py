"""Memory: real limits, measured from outside."""
