"""What makes a start fast: libraries loaded early, a CUDA context opened early, fewer garbage collections."""
