/* Embeds configs/classes.cfg as a string, so that the presets have one source. The path is relative to the
 * repository root, where the compiler runs. */
	.section .rodata
	.global classes_cfg
	.type classes_cfg, @object
classes_cfg:
	.incbin "configs/classes.cfg"
	.byte 0
	.size classes_cfg, . - classes_cfg
	.section .note.GNU-stack, "", @progbits
