# Images of axlearn with every plugin, built from a clone of the repository:
#
#     docker build -t axlearn:0.1.0 .                      # CPUs
#     docker build -t axlearn:0.1.0-cuda --target cuda .   # NVIDIA GPUs
#     docker build -t axlearn:0.1.0-tpu --target tpu .     # TPUs
#
# To add packages, such as Ray or a plugin of your own: --build-arg PACKAGES="axlearn-plugins-runtime[ray] my-plugin".
# docs/launch.md describes the images. tests/test_images.py checks this file and runs its commands.

FROM python:3.12-bookworm AS build
ENV VIRTUAL_ENV=/opt/axlearn UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_NO_EDITABLE=1
RUN python3 -m pip install --no-cache-dir uv==0.13.9
RUN uv venv --python python3 /opt/axlearn
WORKDIR /src
COPY . .
# uv takes the tested versions of all dependencies from pyproject.toml.
RUN uv pip install ./plugins/*

FROM build AS build-cuda
ARG PACKAGES=""
RUN uv pip install "./axlearn_plugins_gpu[kernels]" "jax[cuda12]" $PACKAGES

FROM build AS build-tpu
ARG PACKAGES=""
RUN uv pip install ./axlearn_plugins_tpu $PACKAGES

FROM build AS build-cpu
ARG PACKAGES=""
# Fail without a C++ compiler, instead of leaving out the library.
ENV AXLEARN_NATIVE=required
RUN uv pip install ./axlearn_plugins_cpu $PACKAGES

FROM python:3.12-slim-bookworm AS runtime
RUN useradd --create-home --uid 1000 --user-group axlearn
ENV PATH=/opt/axlearn/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /home/axlearn
USER 1000:1000
EXPOSE 8000
ENTRYPOINT ["axlearn"]
CMD ["--help"]

FROM runtime AS cuda
# For the NVIDIA container runtime. The driver comes from the host, and CUDA's libraries from the Python packages.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-cuda /opt/axlearn /opt/axlearn

FROM runtime AS tpu
COPY --from=build-tpu /opt/axlearn /opt/axlearn
# The device files of a TPU belong to root.
USER root

# The last image is the default of `docker build`.
FROM runtime AS cpu
COPY --from=build-cpu /opt/axlearn /opt/axlearn
