"""Docs: what the pages say is run; the rules of the house are checked."""
