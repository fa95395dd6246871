"""Tests, filed by what they need. They are packages so that a worker can import the functions defined in them."""
