"""Pure: no process, no file, milliseconds each."""
