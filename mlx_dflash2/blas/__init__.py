"""A fast BLAS for MLX's CPU backend on Linux, whose wheel brings a slow one.

Nothing here imports MLX, except for :mod:`.measure`: a BLAS has effect only if it is loaded first.
"""
