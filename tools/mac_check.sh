#!/bin/sh
# What the first owner of a Mac should run: about 20 minutes, and one JSON file to send back.
#
#     tools/mac_check.sh [MODEL] [FILE]
#
# MODEL is a target with a known drafter, such as mlx-community/Qwen3.8-27B-4bit; without it the
# embedded pair is used. FILE is mac_check.json unless named.
set -e
cd "$(dirname "$0")/.."
make .venv/installed
exec .venv/bin/python tools/mac_check.py "$@"
