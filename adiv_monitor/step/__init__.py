"""One measured step, from rows and parameter step to readings, and when there is one."""
