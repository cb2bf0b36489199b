# megatron-core's only wheel is CPython 3.12's, for a C++ helper of its data sets; its Python runs on 3.11 as well.
site=$("$1" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
"$1" -m pip --disable-pip-version-check install -q --no-deps --only-binary=:all: --python-version 3.12 \
	--ignore-requires-python --target "$site" megatron-core==0.19.2
