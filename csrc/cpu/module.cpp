// The Python module metselect_dgl._C: importing it registers the CPU ops.

#include <Python.h>

extern "C" PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", "Native CPU ops of torch.ops.metselect",
                               -1, nullptr};
  return PyModule_Create(&module);
}
