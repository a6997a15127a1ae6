.PHONY: bench

bench: .venv/installed ; $(BIN)/python -m mlx_dflash2.benchmark --limit 1 --max-tokens 12 --verify-widths 4 --no-selector --json examples/results/embedded_pair.json --plots examples/results
