// Words of bits by their size: what tensor cores, addresses in shared memory and pairs of 16-bit numbers are held in.
#pragma once

using u32 = unsigned int;
using u64 = unsigned long long;
