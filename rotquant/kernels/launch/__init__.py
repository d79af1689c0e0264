"""From a CUDA source to a launch: compiling, arguments, tensor maps, operators of torch."""
