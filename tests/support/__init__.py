"""Tiny models, proposers and folders that tests share."""

NO_CLANG = "no clang to run Metal kernels with"
WHAT_THE_BENCH_NEEDS = "install clang-19, llvm-19 and binutils (`apt install` takes these names)"
