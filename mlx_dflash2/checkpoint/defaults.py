"""What a drafter can be quantized to, for functions and flags alike."""

# Bits and group sizes of affine quantization, and the defaults.
BITS, DEFAULT_BITS = (2, 3, 4, 5, 6, 8), 4
GROUP_SIZES, GROUP_SIZE = (32, 64, 128), 64
# Names of the dtypes that a drafter can be stored in.
DTYPE_NAMES = ("bfloat16", "float32")
