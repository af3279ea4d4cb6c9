// What the Python side of the stand-in calls.
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <string>

#include "device.h"
#include "hbm.h"

namespace neuronsim {
namespace {

std::map<std::string, int64_t> read_counters() {
  auto& count = counters();
  return {{"h2d", count.h2d},
          {"staged", count.staged},
          {"cast", count.cast},
          {"bounce", count.bounce},
          {"d2h", count.d2h}};
}

void reset_counters() {
  auto& count = counters();
  count.h2d = count.staged = count.cast = count.bounce = count.d2h = 0;
  hbm().reset_peak();
}

}  // namespace
}  // namespace neuronsim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace neuronsim;
  m.def("register", [](size_t hbm_bytes, int visible_cores) {
    hbm().open(hbm_bytes);
    cores().own = cores().count = visible_cores;
    register_hooks();
  });
  m.def("is_initialized", [] { return cores().initialized.load(); });
  m.def("init", [] { cores().initialized = true; });
  m.def("current_device", [] { return cores().current.load(); });
  m.def("device_count", [] { return cores().count; });
  m.def("set_device", [](int index) { cores().set(index); });
  m.def("assign_core", [](int index, int local_world) { cores().assign(index, local_world); });
  m.def("hbm_bytes", [] { return hbm().capacity_bytes(); });
  m.def("used_bytes", [] { return hbm().used_bytes(); });
  m.def("peak_bytes", [] { return hbm().peak_bytes(); });
  m.def("counters", &read_counters);
  m.def("reset_counters", &reset_counters);
  m.def("begin_uncounted", [] { ++Uncounted::depth; });
  m.def("end_uncounted", [] { --Uncounted::depth; });
}
