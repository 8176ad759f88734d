/* Tables of 256 shuffles: for every byte of a mask, where each of 8 places comes from among the
 * values that are kept. Byte shuffles of AVX2 and NEON both write 0 for a place that is GONE. */
#ifndef SHUFFLES_H
#define SHUFFLES_H

#include <stdint.h>

#define GONE 0x80

/* By how many values of a register are used up by the places before. */
static _Alignas(64) uint8_t of_bytes[9][256][8];
static _Alignas(64) uint8_t of_words[256][16];
/* 16-bit words into the upper halves of 32 bits: bfloat16 as float32. */
static _Alignas(64) uint8_t of_upper_halves[256][32];

__attribute__((constructor)) static void fill_tables(void) {
    for (int mask = 0; mask < 256; mask++) {
        int count = 0;
        for (int place = 0; place < 8; place++) {
            int kept = mask >> place & 1;
            for (int before = 0; before < 9; before++)
                of_bytes[before][mask][place] = (uint8_t)(kept ? before + count : GONE);
            for (int byte = 0; byte < 2; byte++)
                of_words[mask][2 * place + byte] = (uint8_t)(kept ? 2 * count + byte : GONE);
            for (int byte = 0; byte < 4; byte++)
                of_upper_halves[mask][4 * place + byte] =
                    (uint8_t)(kept && byte >= 2 ? 2 * count + byte - 2 : GONE);
            count += kept;
        }
    }
}

#endif
