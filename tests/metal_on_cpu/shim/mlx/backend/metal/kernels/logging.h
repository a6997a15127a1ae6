// Takes the place of MLX's logging.h: kernels on the bench do not log.
#pragma once
