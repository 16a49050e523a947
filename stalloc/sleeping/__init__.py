"""A job that sleeps: all pages go back to the device while the addresses stay, and the bytes are kept elsewhere."""
