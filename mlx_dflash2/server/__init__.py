"""The pair behind OpenAI's API: a thin layer on :mod:`mlx_lm.server`."""
