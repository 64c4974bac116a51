"""Shows runs in a browser: a page of one file, and the same page served while runs train."""
