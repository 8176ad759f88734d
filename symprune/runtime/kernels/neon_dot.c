/* NEON with dot products of bytes, which most 64-bit ARMs made since 2018 have. */
#include "level.h"

#if COMPILES_DOT_PRODUCTS

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif

#define DOT_PRODUCTS 1
#include "neon.h"

const Level neon_dot_level = NEON_LEVEL("neon-dot");

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
