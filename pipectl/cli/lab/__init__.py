"""Commands for experts: `pipectl lab`."""
