{{- define "quire.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "quire.selector" -}}
app.kubernetes.io/name: quire
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "quire.labels" -}}
{{ include "quire.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "quire.image" -}}
{{ printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) | quote }}
{{- end -}}

{{/* The pods that clients reach: each pod, or the head of the RayCluster. */}}
{{- define "quire.serving" -}}
{{- if eq .Values.mode "raycluster" -}}
ray.io/cluster: {{ include "quire.name" . }}
ray.io/node-type: head
{{- else -}}
{{ include "quire.selector" . }}
{{- end -}}
{{- end -}}

{{- define "quire.scheme" -}}
{{- if .Values.tls.secret }}HTTPS{{ else }}HTTP{{ end -}}
{{- end -}}

{{/* Problems that the schema cannot express. */}}
{{- define "quire.check" -}}
{{- if and (not .Values.insecure) (not (and .Values.tls.secret .Values.auth.tokensSecret)) -}}
{{- fail "set tls.secret and auth.tokensSecret, or insecure: true behind a proxy that has TLS and authentication" -}}
{{- end -}}
{{- if eq .Values.mode "raycluster" -}}
{{- if not .Values.fleet }}{{ fail "mode raycluster needs fleet, the text of a fleet file" }}{{ end -}}
{{- if not .Values.ray.tokenSecret }}{{ fail "mode raycluster needs ray.tokenSecret" }}{{ end -}}
{{- if not .Values.ray.workerGroups }}{{ fail "mode raycluster needs ray.workerGroups" }}{{ end -}}
{{- if .Values.keda.enabled }}{{ fail "keda is for mode pods: a fleet scales its replicas itself" }}{{ end -}}
{{- if .Values.inferencePool.enabled }}{{ fail "inferencePool is for mode pods: a fleet's gateway picks the replica itself" }}{{ end -}}
{{- end -}}
{{- if and .Values.inferencePool.enabled (not .Values.inferencePool.endpointPicker.name) -}}
{{- fail "inferencePool needs endpointPicker.name, the Service of the endpoint picker" -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- fail "httpRoute needs parentRefs, the Gateway" -}}
{{- end -}}
{{- end -}}

{{/* Arguments of `quire serve` about listening, TLS and tokens. */}}
{{- define "quire.serverArgs" -}}
- --listen=0.0.0.0:50051
- --http=0.0.0.0:8000
{{- if .Values.tls.secret }}
- --tls-cert=/etc/quire/tls/tls.crt
- --tls-key=/etc/quire/tls/tls.key
{{- end }}
{{- if .Values.auth.tokensSecret }}
- --token-file=/etc/quire/auth/tokens
{{- end }}
{{- if .Values.auth.tenantsConfigMap }}
- --tenants-file=/etc/quire/tenants/tenants.toml
{{- end }}
{{- if .Values.insecure }}
- --insecure
{{- end }}
{{- end -}}

{{- define "quire.env" -}}
{{- if .Values.hub.tokenSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .Values.hub.tokenSecret | quote }}, key: token}}
{{- end }}
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "quire.rayEnv" -}}
- {name: RAY_AUTH_MODE, value: token}
- {name: RAY_AUTH_TOKEN, valueFrom: {secretKeyRef: {name: {{ .Values.ray.tokenSecret | quote }}, key: token}}}
# Each rank selects its GPU by ordinal; ranks that saw only their own could not read each other's memory.
- {name: RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES, value: "1"}
{{- include "quire.env" . }}
{{- end -}}

{{- define "quire.probes" -}}
# /health needs a restart to be cured, /ready is a token that came through all ranks.
startupProbe:
  httpGet: {path: /ready, port: http, scheme: {{ include "quire.scheme" . }}}
  periodSeconds: 5
  timeoutSeconds: 12
  failureThreshold: {{ div (add .Values.startupSeconds 4) 5 }}
livenessProbe:
  httpGet: {path: /health, port: http, scheme: {{ include "quire.scheme" . }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet: {path: /ready, port: http, scheme: {{ include "quire.scheme" . }}}
  periodSeconds: 5
  timeoutSeconds: 12
  failureThreshold: 2
{{- end -}}

{{- define "quire.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "quire.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "quire.mounts" -}}
- {name: cache, mountPath: /var/cache/quire}
- {name: tmp, mountPath: /tmp}
- {name: shared-memory, mountPath: /dev/shm}
{{- if .Values.models.claim }}
- {name: models, mountPath: {{ .Values.models.path | quote }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "quire.volumes" -}}
- name: cache
{{- if .Values.cache.claim }}
  persistentVolumeClaim: {claimName: {{ .Values.cache.claim | quote }}}
{{- else if .Values.cache.sizeLimit }}
  emptyDir: {sizeLimit: {{ .Values.cache.sizeLimit | quote }}}
{{- else }}
  emptyDir: {}
{{- end }}
- {name: tmp, emptyDir: {}}
- {name: shared-memory, emptyDir: {medium: Memory, sizeLimit: {{ .Values.sharedMemory | quote }}}}
{{- if .Values.models.claim }}
- {name: models, persistentVolumeClaim: {claimName: {{ .Values.models.claim | quote }}, readOnly: true}}
{{- end }}
{{- end -}}

{{- define "quire.serverMounts" -}}
{{- if .Values.tls.secret }}
- {name: tls, mountPath: /etc/quire/tls, readOnly: true}
{{- end }}
{{- if .Values.auth.tokensSecret }}
- {name: auth, mountPath: /etc/quire/auth, readOnly: true}
{{- end }}
{{- if .Values.auth.tenantsConfigMap }}
- {name: tenants, mountPath: /etc/quire/tenants, readOnly: true}
{{- end }}
{{- end -}}

{{- define "quire.serverVolumes" -}}
{{- if .Values.tls.secret }}
- {name: tls, secret: {secretName: {{ .Values.tls.secret | quote }}, defaultMode: 0440}}
{{- end }}
{{- if .Values.auth.tokensSecret }}
- {name: auth, secret: {secretName: {{ .Values.auth.tokensSecret | quote }}, defaultMode: 0440}}
{{- end }}
{{- if .Values.auth.tenantsConfigMap }}
- {name: tenants, configMap: {name: {{ .Values.auth.tenantsConfigMap | quote }}}}
{{- end }}
{{- end -}}

{{/* Where pods may run: (list nodeSelector tolerations affinity). */}}
{{- define "quire.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* requests and limits with the accelerators of (dict resources gpus gpuResource rdmaResource). */}}
{{- define "quire.resources" -}}
{{- range $kind := list "requests" "limits" }}
{{ $kind }}:
{{- with index $.resources $kind }}
{{ toYaml . | indent 2 }}
{{- end }}
{{- if $.gpus }}
  {{ $.gpuResource }}: {{ $.gpus | quote }}
{{- end }}
{{- with $.rdmaResource }}
  {{ . }}: "1"
{{- end }}
{{- end }}
{{- end -}}
