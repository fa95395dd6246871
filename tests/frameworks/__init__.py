"""Frameworks: the real ones, never a stand-in; skipped where one is not installed."""
