"""What stages cost: time, messages and memory, and the devices and links that decide it."""
