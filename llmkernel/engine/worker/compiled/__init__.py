"""What lies between the matrix products of a step, compiled for this processor at the first load, by numba."""
