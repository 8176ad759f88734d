/* NEON, which every 64-bit ARM has. */
#include "level.h"

#if defined(__aarch64__)

#define DOT_PRODUCTS 0
#include "neon.h"

const Level neon_level = NEON_LEVEL("neon");

#endif
