#include "constants.h"

#include "packed_weights.h"

namespace {

struct Constant {
  const char* name;
  int64_t value;
};

#define DTYPE(code, name) {"dtype." #name, code},
#define GATE(code, name) {"gate." #name, code},
#define HEAD_DIM(value) {"head_dim." #value, value},
constexpr Constant CONSTANTS[] = {
    FOR_EACH_DTYPE(DTYPE)
    FOR_EACH_GATE(GATE)
    FOR_EACH_HEAD_DIM(HEAD_DIM)
    {"simd_lanes", LANES},
    {"panel_len", PANEL_LEN},
    {nullptr, 0},
};

}  // namespace

// Names and values; a null name ends the list.
extern "C" const Constant* quire_constants() { return CONSTANTS; }
