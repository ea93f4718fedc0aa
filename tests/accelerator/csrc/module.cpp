// What Python is told.
#include <torch/extension.h>

#include <torch/csrc/utils/pybind.h>

#include "collectives.h"
#include "generator.h"
#include "memory.h"

namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace pretend;
  using Free = py::call_guard<py::gil_scoped_release>;
  m.def("device_count", &device_count);
  m.def("physical", &physical);
  m.def("current_device", &current_device);
  m.def("set_device", &set_device);
  m.def("is_initialized", &is_initialized);
  m.def("is_in_bad_fork", &is_in_bad_fork);
  m.def("init", &use);
  m.def("call_at_first_use", [](py::function call) {
    auto* kept = new py::function(std::move(call));  // for good
    call_at_first_use([kept] {
      py::gil_scoped_acquire gil;
      (*kept)();
    });
  });
  m.def("synchronize", &finish_device, Free());
  m.def("memory_allocated", &memory_allocated);
  m.def("memory_total", &memory_total);
  m.def("default_generator", &default_generator);
  m.def("make_collectives", &make_collectives);
}
