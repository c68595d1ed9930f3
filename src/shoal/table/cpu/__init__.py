"""Tables on the CPU, over the compiled core."""
